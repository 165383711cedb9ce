"""Number formats and rounding rules that trainer, engines, checkpoints and kernels share: torch only, no state.

One codec per file (``e2m1``, ``e4m3``, ``nvfp4``), guided rounding in ``guided``. Everything here is the reference that each
faster path is tested against bit for bit (DESIGN.md 3.1).
"""
