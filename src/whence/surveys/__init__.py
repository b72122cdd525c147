"""The same questions about a corpus: shards of texts, their columns, the engines that run them, and what they say."""
