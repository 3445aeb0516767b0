//go:build race

package sqlite_test

// How often the gateway is killed, and after how many acknowledged lines: less where each process starts and runs slowly.
const (
	kills     = 10
	busyLines = 150
)
