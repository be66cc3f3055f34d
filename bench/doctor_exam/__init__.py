"""The doctor's exam: injected faults and healthy controls, judged by `twostroke doctor`."""
