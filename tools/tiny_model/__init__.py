"""Makes the built-in base model (`workers/model/tiny/weights`) from text that it writes itself: corpus, tokenizer,
training. Nothing that is installed imports it.
"""
