"""Mutation testing: one fault at a time in the kernel's PTX or in how it is launched, and whether the checks notice.

    python -m fa2_cute.mutation --help

``ptx_mutants`` and ``call_mutants`` list the faults, ``battery`` the cases that each must fail, ``equivalents`` the
faults that change nothing that a result could show, ``trial`` tries one and ``__main__`` samples, runs and reports.
"""
