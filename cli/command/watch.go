package command

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

const (
	reconnectFirst = 500 * time.Millisecond
	reconnectMost  = 10 * time.Second
)

// errSilent ends a stream on which nothing came for longer than the gateway promises.
var errSilent = errors.New("nothing heard from the gateway")

// watchEvents is what a watch calls; each may be nil.
type watchEvents struct {
	Fresh   func()                                           // a new round of full states begins
	State   func(*carrelv1.Workspace) (done bool, err error) // one state
	Settled func() error                                     // the picture is whole again
	Lost    func(text string)                                // the gateway is not reached; tried again
	Patient bool                                             // see persistence
}

// watch follows workspaces until State says done, an error that will not pass, or the end of ctx, which is no error of
// its own. A gateway that goes away is waited for, timeout.reconnect at most.
func (c *api) watch(ctx context.Context, req *carrelv1.WatchRequest, on watchEvents) error {
	return c.keepUp(ctx, persistence{lost: on.Lost, patient: on.Patient}, func(ctx context.Context, alive func()) (bool, error) {
		stream, err := c.workspaces.Watch(ctx, connect.NewRequest(req))
		if err != nil {
			return false, err
		}
		defer func() { _ = stream.Close() }()
		if on.Fresh != nil {
			on.Fresh()
		}
		settled := false
		for stream.Receive() {
			alive()
			if w := stream.Msg().GetWorkspace(); w != nil {
				if done, err := on.State(w); done || err != nil {
					return true, err
				}
			} else {
				settled = true // also at each keep-alive: ages go on
			}
			if settled && on.Settled != nil {
				if err := on.Settled(); err != nil {
					return true, err
				}
			}
		}
		return false, stream.Err()
	})
}

// persistence says what to do about a gateway that is not reached.
type persistence struct {
	lost    func(text string)
	patient bool // wait for it also when it was not reached even once
}

// keepUp runs a stream again and again until it is done. once calls alive at each message.
func (c *api) keepUp(ctx context.Context, p persistence, once func(ctx context.Context, alive func()) (done bool, err error)) error {
	pause := reconnectFirst
	heard, reached := time.Now(), p.patient
	for {
		done, err := c.guarded(ctx, once, func() { pause, heard, reached = reconnectFirst, time.Now(), true })
		switch {
		case done:
			return err
		case ctx.Err() != nil:
			return failf(exitInterrupted, "interrupted")
		case !reached && err != nil, !passing(err):
			return c.rpcError(ctx, err)
		case time.Since(heard) > c.timeout.Reconnect:
			return c.rpcError(ctx, err)
		}
		if p.lost != nil {
			p.lost("the gateway is not reached (" + reason(err) + "); trying again")
		}
		if !sleep(ctx, pause) {
			return failf(exitInterrupted, "interrupted")
		}
		pause = min(2*pause, reconnectMost)
	}
}

// guarded runs once with a watchdog that ends it when it is silent for too long.
func (c *api) guarded(ctx context.Context, once func(context.Context, func()) (bool, error), alive func()) (bool, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	dog := time.AfterFunc(c.timeout.Silence, func() { cancel(errSilent) })
	defer dog.Stop()
	done, err := once(ctx, func() {
		dog.Reset(c.timeout.Silence)
		alive()
	})
	if errors.Is(context.Cause(ctx), errSilent) {
		err = connect.NewError(connect.CodeUnavailable, errSilent)
	}
	return done, err
}

// passing reports whether the end of a stream may be mended by trying again. A stream that ends without an error is one
// that the gateway closed, as it does when it stops.
func passing(err error) bool {
	if err == nil {
		return true
	}
	var f *failure
	if errors.As(err, &f) {
		return f.code == exitUnavailable
	}
	switch connect.CodeOf(err) {
	case connect.CodeUnavailable, connect.CodeAborted:
		return true
	case connect.CodeUnknown, connect.CodeInternal, connect.CodeCanceled, connect.CodeInvalidArgument:
		return !connect.IsWireError(err) && connect.CodeOf(err) != connect.CodeInvalidArgument // cut in the middle
	default:
		return false
	}
}

func reason(err error) string {
	if err == nil {
		return "it closed the stream"
	}
	return output.Line(netReason(err))
}
