//go:build cgo && linux

package nvml

import "github.com/carrel-dev/carrel/agent/gpu"

// New returns the source of the host's NVIDIA devices. It never fails: what stands in the way is the inventory's Problem,
// and every inventory tries again.
func New(cfg Config) gpu.Source {
	cfg = cfg.withDefaults()
	driver := newDriver(cfg, openLibrary(cfg.Library))
	return gpu.Isolate(driver, gpu.IsolateConfig{Limit: cfg.Limit, Now: cfg.Now})
}
