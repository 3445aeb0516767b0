package host

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// bootIDPath is the kernel's random id of this boot (random(4)).
const bootIDPath = "/proc/sys/kernel/random/boot_id"

type systemClock struct{ boot string }

var _ Clock = systemClock{}

// SystemClock reads the kernel's clocks.
func SystemClock() (Clock, error) {
	boot, err := os.ReadFile(bootIDPath)
	if err != nil {
		return nil, fmt.Errorf("read the boot id: %w", err)
	}
	c := systemClock{boot: strings.TrimSpace(string(boot))}
	if c.boot == "" {
		return nil, fmt.Errorf("read the boot id: %s is empty", bootIDPath)
	}
	return c, nil
}

func (c systemClock) Now() Moment {
	var ts unix.Timespec
	// CLOCK_BOOTTIME exists since Linux 2.6.39 and cannot fail with a valid pointer.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return Moment{Boot: c.boot, Up: time.Duration(ts.Nano()), Wall: time.Now().Round(0)}
}
