"""What `--mode=` does beside training: `inspect` shows the data, `verify` the exactness, `replay` one update's rows and
tokens.
"""
