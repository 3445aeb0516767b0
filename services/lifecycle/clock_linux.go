package lifecycle

import (
	"time"

	"golang.org/x/sys/unix"
)

// BootTime reads CLOCK_BOOTTIME: time since the machine started, sleep included. Go's own monotonic clock stops in suspend (golang/go#24595).
func BootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("clock_gettime(CLOCK_BOOTTIME): " + err.Error()) // there since Linux 2.6.39
	}
	return time.Duration(ts.Nano())
}
