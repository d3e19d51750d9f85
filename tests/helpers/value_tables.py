"""The values of the codes of an element format, from its fields alone."""

import math

from fp4train.formats import ElementFormat


def value_table(fmt: ElementFormat) -> list[float]:
    """The value of every code, in code order."""
    values = []
    for code in range(1 << fmt.bits):
        sign = -1.0 if code & fmt.sign_bit else 1.0
        unsigned = code & fmt.nan_code
        if unsigned > fmt.last_number_code:
            values.append(math.nan)
        elif fmt.has_inf and unsigned == fmt.infinity_code:
            values.append(sign * math.inf)
        else:
            values.append(sign * fmt.magnitude_of(unsigned))
    return values
