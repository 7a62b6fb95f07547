"""Files of a checkpoint, read and written without a toolkit, so that both halves and the command line can use them."""
