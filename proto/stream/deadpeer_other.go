//go:build !linux

package stream

import "time"

// setUserTimeout does nothing: keep-alive probes alone have to do here.
func setUserTimeout(any, time.Duration) error { return nil }
