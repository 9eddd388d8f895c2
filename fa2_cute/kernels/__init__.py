"""Device code, written in the CuTe DSL. Nothing here imports torch."""
