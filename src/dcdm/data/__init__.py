"""Where text comes from and how it becomes batches of tokens.

In the order of a text's way: sources (names to files), reading (files to documents), tokenizers, chats
(by a tokenizer's template), examples (rows of fine-tuning data), shards (documents to tokens on the disk), prepare
(all of this, once), store (prepared folders and windows over them), loader (windows to batches).
"""
