"""What makes SGLang fast on a machine with no GPU: packed weights, compiled pieces, batched attention.

Only the platform imports from here, inside an engine's process; nothing here knows of the plugin layer.
"""
