//go:build !cgo || !linux

package nvml

import "github.com/carrel-dev/carrel/agent/gpu"

// New returns a source without devices: asking the driver needs cgo and Linux.
func New(cfg Config) gpu.Source {
	_ = cfg.withDefaults()
	return gpu.Null("built without cgo: this carreld cannot ask the NVIDIA driver; use a build with cgo on Linux")
}
