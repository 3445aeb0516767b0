// Package nvml is the source of devices that asks an NVIDIA driver through its library, libnvidia-ml.so.1.
//
// It is the only importer of go-nvml. Without cgo, or on another system than Linux, New returns a source that says so.
package nvml

import "time"

// DefaultLibrary is searched for as any shared library is; only this name is sure to exist (the unversioned one comes with
// development packages).
const DefaultLibrary = "libnvidia-ml.so.1"

// Config sets up New. The zero value is what a host needs, but for Now.
type Config struct {
	// Library is a name or a path; default DefaultLibrary.
	Library string
	// Limit bounds every question to the driver about one GPU; default gpu.DefaultDeviceLimit.
	Limit time.Duration
	// ReopenAfter is how long a lost GPU is waited for before the driver is opened anew to look for it, which happens
	// only while no question is open; default 1 min.
	ReopenAfter time.Duration
	// Now is the clock.
	Now func() time.Time
}

func (c Config) withDefaults() Config {
	if c.Library == "" {
		c.Library = DefaultLibrary
	}
	if c.ReopenAfter <= 0 {
		c.ReopenAfter = time.Minute
	}
	return c
}
