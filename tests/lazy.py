"""`from lazy import transformers`: a module that takes seconds, imported at its first use: not in
each of pytest's workers. `lib` are the modules of examples/lib."""

import importlib


class Lazy:
    """The attributes of a module, and its submodules."""

    def __init__(self, name):
        self.module_name = name

    def __getattr__(self, name):
        if name.startswith("_"):  # pytest asks each object of a file whether it is a test
            raise AttributeError(name)
        module = importlib.import_module(self.module_name)
        if not hasattr(module, name):
            importlib.import_module(f"{self.module_name}.{name}")
        return getattr(module, name)


def __getattr__(name):
    if name.startswith("_"):  # Python asks whether this is a package
        raise AttributeError(name)
    return Lazy(name)
