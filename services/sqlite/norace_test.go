//go:build !race

package sqlite_test

// How often the gateway is killed, and after how many acknowledged lines.
const (
	kills     = 50
	busyLines = 500
)
