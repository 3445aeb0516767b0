package rpc

import (
	"context"
	"slices"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/services/event"
	"github.com/carrel-dev/carrel/services/fleet"
)

// mostEvents is how many events a log shows at most.
const mostEvents = 1000

// Logs sends the workspace's events, then what the container's first process wrote.
func (s *Workspaces) Logs(ctx context.Context, req *connect.Request[carrelv1.LogsRequest], stream *connect.ServerStream[carrelv1.LogsResponse]) error {
	if req.Msg.GetTail() < 0 || req.Msg.GetEpoch() < 0 {
		return fleet.Errorf(fleet.KindInvalid, "tail and epoch must be 0 or more")
	}
	w, err := s.find(ctx, req.Msg.GetWorkspace())
	if err != nil {
		return err
	}
	epoch := req.Msg.GetEpoch()
	if epoch == 0 {
		epoch = w.Epoch
	}
	events, err := s.events(ctx, w.ID, epoch, int(req.Msg.GetTail()))
	if err != nil {
		return err
	}
	for _, e := range events {
		if err := sendLine(stream, e.At, "event", logText(e)); err != nil {
			return err
		}
	}
	run, err := s.Store.Run(ctx, fleet.RunKey{Workspace: w.ID, Epoch: epoch})
	if fleet.IsKind(err, fleet.KindNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if run, err = s.placed(ctx, run, req.Msg.GetFollow()); err != nil || run.Host == "" || !run.GoneAt.IsZero() {
		return err // nothing of it is left on a host
	}
	return s.LogLines.Logs(ctx, run.Host, run.Key, req.Msg.GetFollow(), int(req.Msg.GetTail()), func(at time.Time, line string) error {
		return sendLine(stream, at, "container", line)
	})
}

// placed waits, when following, until the run has a host or is over.
func (s *Workspaces) placed(ctx context.Context, run fleet.Run, follow bool) (fleet.Run, error) {
	if !follow || run.Host != "" || !run.EndedAt.IsZero() {
		return run, nil
	}
	errPlaced := fleet.Errorf(fleet.KindConflict, "placed")
	err := s.Watcher.Each(ctx, event.Filter{Topic: event.Workspaces, Workspace: run.Key.Workspace}, func() error {
		var err error
		if run, err = s.Store.Run(ctx, run.Key); err != nil {
			return err
		}
		if run.Host != "" || !run.EndedAt.IsZero() || !run.GoneAt.IsZero() {
			return errPlaced
		}
		return nil
	})
	if err == errPlaced { //nolint:errorlint // the very value from above, never wrapped
		return run, nil
	}
	return run, err
}

// events returns the events of one run, oldest first.
func (s *Workspaces) events(ctx context.Context, id fleet.WorkspaceID, epoch int64, tail int) ([]fleet.Event, error) {
	all, err := s.Store.Events(ctx, id, mostEvents)
	if err != nil {
		return nil, err
	}
	mine := slices.DeleteFunc(all, func(e fleet.Event) bool { return e.Epoch != epoch && e.Epoch != 0 })
	slices.SortStableFunc(mine, func(a, b fleet.Event) int { return a.At.Compare(b.At) })
	if tail > 0 && len(mine) > tail {
		mine = mine[len(mine)-tail:]
	}
	return mine, nil
}

func sendLine(stream *connect.ServerStream[carrelv1.LogsResponse], at time.Time, source, text string) error {
	return stream.Send(&carrelv1.LogsResponse{Lines: []*carrelv1.LogLine{{Time: stamp(at), Source: source, Text: text}}})
}
