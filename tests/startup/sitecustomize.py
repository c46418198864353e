"""Every Python that the tests start does this first: the objects of a hundred imports are not
garbage, and looking for some among them takes a fifth of the time that importing torch takes."""

import gc

gc.set_threshold(1_000_000)
