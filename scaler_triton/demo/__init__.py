"""The demo: a small transformer trained with any scaler, and torch's known defects side by side with ours."""
