package gateway

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/hostclient"
)

// hostLogs gives the handlers one line of a host's log at a time.
type hostLogs struct{ hosts *hostclient.Client }

// Logs sends what a run's first process wrote.
func (h hostLogs) Logs(ctx context.Context, host fleet.HostID, run fleet.RunKey, follow bool, tail int, send func(at time.Time, line string) error) error {
	return h.hosts.Logs(ctx, host, hostclient.LogsQuery{Run: run, Follow: follow, Tail: tail}, func(lines []hostclient.LogLine) error {
		for _, line := range lines {
			if err := send(line.At, line.Text); err != nil {
				return err
			}
		}
		return nil
	})
}
