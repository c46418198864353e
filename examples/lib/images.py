# SPDX-License-Identifier: Apache-2.0
"""Image files as they were meant. A file that cannot be read so is an OSError that names it."""

from contextlib import contextmanager

from PIL import Image, ImageOps

from ddp_cifar import exit_with_error


def read_image(file, name=None):
    """Return an image of a path, or of an open file that is called `name`, as PIL's in RGB."""
    image = read_pixels(file, name)
    check_depth(image, name or file)
    return image.convert("RGB")


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
    if missing := [path for path in paths if not path.exists()]:
        exit_with_error(f"{named}: {missing[0]} is missing ({len(missing)} files in all)")


def read_pixels(file, name=None):
    """Return an image of PIL, turned as its EXIF says: cameras save what their sensor has."""
    with opened(file, name) as image:
        return ImageOps.exif_transpose(image)


@contextmanager
def opened(file, name=None):
    """Open an image of PIL. Name it in an error."""
    try:
        with Image.open(file) as image:
            yield image
    except Exception as error:  # PIL raises many types
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{name or file}: {reason}") from None
