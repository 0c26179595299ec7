"""`--mode=plan`: what a run would take in memory, time and network, before it is paid for, by estimate and by compiler.
"""
