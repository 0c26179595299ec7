"""Fewer bits: matrix products of 8-bit numbers (`matmul`), and frozen parameters kept in 8 or 4 bits (`quantize`).

May import: models.cpu.
"""
