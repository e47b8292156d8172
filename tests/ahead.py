"""For the server that ranks of tests are forked from: what their first step on a GPU would import, once for all."""

from lockstep.engine.template import GPU_DRIVERS, import_ahead

if any(driver.exists() for driver in GPU_DRIVERS):
    import_ahead()
