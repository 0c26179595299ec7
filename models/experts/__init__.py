"""Mixture of experts: the router (`moe`), products with one matrix per expert (`grouped`), experts on several devices.
"""
