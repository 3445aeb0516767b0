package command

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type logsOptions struct {
	follow bool
	tail   int32
	epoch  int64
	raw    bool
	times  bool
}

func newLogs(a *app) *cobra.Command {
	o := logsOptions{}
	cmd := &cobra.Command{
		Use:   "logs NAME",
		Short: "What the container's first process wrote, and what happened to the workspace",
		Long:  "Escape sequences are taken out, but for colours on a terminal; --raw leaves all as it was written.",
		Args:  exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.tail < 0 || o.epoch < 0 {
				return usagef("--tail and --run must not be negative")
			}
			return a.logs(cmd.Context(), args[0], o)
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "go on until the run ends")
	cmd.Flags().Int32Var(&o.tail, "tail", 0, "begin with the last `LINES`; 0: all that is kept")
	cmd.Flags().Int64Var(&o.epoch, "run", 0, "an earlier run, by its `NUMBER` in `show`")
	cmd.Flags().BoolVar(&o.raw, "raw", false, "control characters as written")
	cmd.Flags().BoolVarP(&o.times, "time", "t", false, "begin each line with its time")
	return cmd
}

func (a *app) logs(ctx context.Context, ref string, o logsOptions) error {
	api, err := a.connect()
	if err != nil {
		return err
	}
	out := bufio.NewWriter(a.sys.Out)
	at := logPosition{}
	once := func(ctx context.Context, alive func()) (bool, error) {
		at.again()
		req := &carrelv1.LogsRequest{Workspace: ref, Follow: o.follow, Tail: o.tail, Epoch: o.epoch}
		if at.count > 0 {
			req.Tail = 0
		}
		stream, err := api.workspaces.Logs(ctx, connect.NewRequest(req))
		if err != nil {
			return false, err
		}
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			alive()
			for _, l := range stream.Msg().GetLines() {
				if at.isNew(l) {
					_, _ = out.WriteString(a.logLine(l, o)) // Flush tells
				}
			}
			if err := out.Flush(); err != nil { // not the gateway's doing
				return true, failf(exitFailure, "write output: %v", err)
			}
		}
		return stream.Err() == nil, stream.Err()
	}
	if o.follow {
		quiet := *api
		quiet.timeout.Silence = quiet.timeout.Reconnect // a program may write nothing for long
		return quiet.keepUp(ctx, persistence{lost: func(text string) { a.say("carrel: %s", text) }}, once)
	}
	_, err = once(ctx, func() {})
	if errors.Is(err, context.Canceled) {
		return failf(exitInterrupted, "interrupted")
	}
	return api.rpcError(ctx, err)
}

func (a *app) logLine(l *carrelv1.LogLine, o logsOptions) string {
	text := l.GetText()
	if !o.raw {
		text = output.Log(text, a.color())
	}
	var b strings.Builder
	if o.times {
		b.WriteString(l.GetTime().AsTime().UTC().Format(momentLayout) + " ")
	}
	if l.GetSource() == "event" {
		b.WriteString("-- ")
	}
	fmt.Fprintln(&b, text)
	return b.String()
}

// logPosition knows which lines were shown, so that a stream that is opened anew does not show them twice.
type logPosition struct {
	last  time.Time // latest time of a line shown
	count int       // lines shown that have it

	resumeAt time.Time // of a stream opened anew: what last was then
	skip     int       // lines of that time still to come again
	resumed  bool
}

// again begins another stream.
func (p *logPosition) again() { p.resumed, p.resumeAt, p.skip = p.count > 0, p.last, p.count }

func (p *logPosition) isNew(l *carrelv1.LogLine) bool {
	t := l.GetTime().AsTime()
	if p.resumed && t.Before(p.resumeAt) {
		return false
	}
	if p.resumed && t.Equal(p.resumeAt) && p.skip > 0 {
		p.skip--
		return false
	}
	switch {
	case p.count == 0 || t.After(p.last):
		p.last, p.count = t, 1
	case t.Equal(p.last):
		p.count++
	}
	return true
}
