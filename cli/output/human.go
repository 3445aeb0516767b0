package output

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Age says how long d is in at most two parts, such as `3m20s`, `2h05m`, `4d03h`.
func Age(d time.Duration) string {
	s := int64(max(d, 0) / time.Second)
	switch {
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	case s < 86400:
		return fmt.Sprintf("%dh%02dm", s/3600, s%3600/60)
	default:
		return fmt.Sprintf("%dd%02dh", s/86400, s%86400/3600)
	}
}

// MiB writes a size given in MiB in the largest unit that keeps it exact to one decimal, such as `512MiB`, `24GiB`, `1.5TiB`.
func MiB(n int64) string {
	units := []string{"MiB", "GiB", "TiB", "PiB"}
	v := float64(n)
	i := 0
	for v >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0") + units[i]
}

// Bytes writes a size given in bytes as MiB does, from `B` on.
func Bytes(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	v := float64(n)
	i := 0
	for v >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0") + units[i]
}

// Hours writes milliseconds as hours with four decimals (to 0.36 s), rounded half up in whole numbers.
func Hours(ms int64) string {
	sign := ""
	if ms < 0 {
		sign, ms = "-", -ms
	}
	tenThousandths := (ms*10 + 1800) / 3600 // 1 h / 10,000 = 360 ms
	return fmt.Sprintf("%s%d.%04d", sign, tenThousandths/10000, tenThousandths%10000)
}

// Micros writes millionths of a currency unit with two decimals, rounded half up; places chooses more.
func Micros(micros int64, places int) string {
	sign := ""
	if micros < 0 {
		sign, micros = "-", -micros
	}
	step := int64(1)
	for range 6 - places {
		step *= 10
	}
	n := (micros + step/2) / step
	unit := 1_000_000 / step
	return fmt.Sprintf("%s%d.%0*d", sign, n/unit, places, n%unit)
}

// Stamp writes a moment for people in the local zone, to the minute.
func Stamp(t time.Time) string { return t.Local().Format("2006-01-02 15:04") }
