"""Where text comes from and how it becomes batches of tokens.

In the order of a text's way: sources (names to files to documents), tokenizers, chats (rows of fine-tuning data to
examples), prepare (all of this to tokens on the disk, once), store (prepared folders), loader (windows over their
tokens to batches). The settings are `dcdm.config.DataConfig`.
"""
