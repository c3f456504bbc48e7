"""Cryptography that names no way: generators, point functions, rings, sharing, sealing."""
