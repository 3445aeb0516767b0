//go:build linux

package rig

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Busy returns the CPU time that all programs, the kernel and other guests of the hardware took since the machine
// started (proc(5), /proc/stat: user, nice, system, irq, softirq, steal).
func Busy() (time.Duration, error) {
	content, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(content), "\n")
	f := strings.Fields(line)
	if len(f) < 9 || f[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat begins with %.60q", line)
	}
	var ticks int64
	for _, i := range []int{1, 2, 3, 6, 7, 8} {
		n, err := strconv.ParseInt(f[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * clockTick, nil
}

const (
	calmLook  = time.Second
	calmCores = 0.25
)

// Calm waits until the machine does next to nothing for a second, at most for limit; 0 does not wait.
func Calm(ctx context.Context, limit time.Duration) (waited time.Duration, err error) {
	began := time.Now()
	for time.Since(began) < limit {
		before, err := Busy()
		if err != nil {
			return 0, err
		}
		look := time.Now()
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(calmLook):
		}
		after, err := Busy()
		if err != nil {
			return 0, err
		}
		if (after-before).Seconds()/time.Since(look).Seconds() < calmCores {
			break
		}
	}
	return time.Since(began).Truncate(time.Second), nil
}
