"""What op calls act on: tensor handles, the current model, and the memory behind them."""
