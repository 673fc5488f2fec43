"""The network: masks, attention, routings, caches. Knows no objective and no decoder.

Read masks (who may attend to whom), then reference (the whole network, literally), chunking (the paper's layer: its
soft path, and `assign`, the hard routing argmax(r + b)), routing (partitions that do not depend on noise: blocks,
controls, the causal routing), then transformer (the network as it runs) with what makes it fast: layout,
attention, blockmask, products, cache.
"""
