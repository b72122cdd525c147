"""Where did this hidden state come from? One file per measure, named as in its paper."""
