"""The network: masks, attention, routings, caches. Knows no objective and no decoder.

Read masks (who may attend to whom), then reference (the whole network, literally), chunking and routing (the
paper's nouns), then transformer (the network as it runs) with what makes it fast: layout, tiling, attention,
blockmask, products, incremental_router, cache.
"""
