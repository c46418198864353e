# SPDX-License-Identifier: Apache-2.0
"""Image files as they were meant. A file that cannot be read so is an OSError that names it."""

from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps

from ddp_cifar import RANK, exit_with_error, log_line


def read_image(file, name=None):
    """Return an image as PIL's in RGB: of a path, of an open file that is called `name`, or of what
    a row of a dataset has `Stored`."""
    image = read_pixels(file, name)
    check_depth(image, name or file)
    if image.has_transparency_data:  # what is drawn in black on nothing would be all black
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def is_image(path):
    """Return whether PIL reads files with this ending, in lower or upper case."""
    return Image.registered_extensions().get(Path(path).suffix.lower()) in formats()


def formats():
    """Return the formats that PIL reads itself: for EPS, whatever its file is called, it starts a
    Ghostscript that is installed."""
    Image.init()
    return [x for x in Image.OPEN if x != "EPS"]


def is_of_a_program(path, folder):
    """Return whether a name on the way from a folder to a file begins with "." or "@", as those
    that programs add: .ipynb_checkpoints, @eaDir, ._1.jpg."""
    return any(name[0] in ".@" for name in Path(path).relative_to(folder).parts)


def log_left_out(folder, used):
    """Log how many files below a folder are not among those that are used."""
    if RANK == 0:
        files = (x for x in Path(folder).rglob("*") if x.is_file() and x.name[0] != ".")
        if others := sorted({*files} - {*map(Path, used)}):
            log_line(f"{folder}: {len(others)} files are left out, such as {others[0]}")


def stored_size(path):
    """Return the (width, height) of an image before it is turned, without reading its pixels."""
    with opened(path) as image:
        size = image.size
    check_depth(image, path)
    return size


def check_depth(image, name):
    if image.mode.startswith(("I", "F")):  # PIL would make white of all but the darkest
        raise OSError(f"{name} has more than 8 bits for a grey pixel: save it with 8")


def exit_if_missing(paths, named):
    """Exit with an error if a file is missing: a training would find it after hours."""
    if missing := [x for x in paths if isinstance(x, Path) and not x.exists()]:
        exit_with_error(f"{named}: {missing[0]} is missing ({len(missing)} files in all)")


def read_pixels(file, name=None):
    """Return an image of PIL, turned as its EXIF says: cameras save what their sensor has."""
    with opened(file, name) as image:
        return ImageOps.exif_transpose(image)


@contextmanager
def opened(file, name=None):
    """Open an image of PIL. Name it in an error."""
    try:
        opened_file = file.file() if hasattr(file, "file") else file
        with Image.open(opened_file, formats=formats()) as image:
            yield image
    except Exception as error:  # PIL raises many types
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{name or file}: {reason}") from None
