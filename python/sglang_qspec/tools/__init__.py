"""The commands of `qspec`, a folder for each family. The system imports nothing from here.

Where a command imports torch, SGLang or an optional package, it does so in functions: `--help`,
checks of options and `qspec top` must not take the seconds of these imports, and `qspec doctor`
also reports that a package is missing.
"""
