package link

import (
	"context"
	"errors"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/carrel-dev/carrel/agent/host"
	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/agent/v1/agentv1connect"
)

// Machine is one host as its gateway sees it.
type Machine interface {
	Apply(ctx context.Context, stamp host.Stamp, set host.Set) (host.Stamp, error)
	Observe(ctx context.Context, after int64, wait time.Duration, send func(host.Batch) error) error
	Sample(ctx context.Context) ([]host.DeviceReading, []host.RunReading, error)
	Logs(ctx context.Context, k host.Key, q host.LogQuery, each func(at time.Time, line string) error) error
	ResolveImage(ctx context.Context, ref string) (host.Resolved, error)
}

// HostService answers a gateway for a machine.
type HostService struct {
	// Machine does the work.
	Machine Machine
	// DialBackFunc makes the agent dial more byte streams.
	DialBackFunc func(n int) error
}

var (
	_ agentv1connect.HostServiceHandler = (*HostService)(nil)
	_ Machine                           = (*host.Host)(nil)
)

// Handler serves it over a link.
func (s *HostService) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewHostServiceHandler(s))
	return mux
}

// maxDialBack is the most connections of one DialBack (see its proto).
const maxDialBack = 64

// Apply takes the full desired state.
func (s *HostService) Apply(ctx context.Context, req *connect.Request[agentv1.ApplyRequest]) (*connect.Response[agentv1.ApplyResponse], error) {
	set, err := setOf(req.Msg)
	if err != nil {
		return nil, coded(err)
	}
	highest, err := s.Machine.Apply(ctx, stampOf(req.Msg.GetStamp()), set)
	if err != nil {
		return nil, coded(err)
	}
	return connect.NewResponse(&agentv1.ApplyResponse{Stamp: stampProto(highest)}), nil
}

// Observe streams what the host is and does.
func (s *HostService) Observe(ctx context.Context, req *connect.Request[agentv1.ObserveRequest], out *connect.ServerStream[agentv1.ObserveResponse]) error {
	wait := host.ObserveTime
	if req.Msg.GetMaxWait() != nil {
		wait = req.Msg.GetMaxWait().AsDuration()
		if wait <= 0 {
			wait = time.Nanosecond // what is there, and no waiting
		}
	}
	if req.Msg.GetAfterSeq() < 0 {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("after_seq is negative"))
	}
	return coded(s.Machine.Observe(ctx, req.Msg.GetAfterSeq(), wait, func(b host.Batch) error { return out.Send(batchProto(b)) }))
}

// Sample measures devices and runs.
func (s *HostService) Sample(ctx context.Context, _ *connect.Request[agentv1.SampleRequest]) (*connect.Response[agentv1.SampleResponse], error) {
	devices, runs, err := s.Machine.Sample(ctx)
	if err != nil {
		return nil, coded(err)
	}
	return connect.NewResponse(sampleProto(devices, runs)), nil
}

// Lines of one LogsResponse: what came together goes together, up to a count and a size below Connect's message limits.
const (
	logBatchLines = 200
	logBatchBytes = 256 << 10
	logBatchWait  = 50 * time.Millisecond
)

// Logs streams what a run's first process wrote.
func (s *HostService) Logs(ctx context.Context, req *connect.Request[agentv1.LogsRequest], out *connect.ServerStream[agentv1.LogsResponse]) error {
	m := req.Msg
	if m.GetTail() < 0 {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("tail is negative"))
	}
	lines := newBatcher(out.Send)
	err := s.Machine.Logs(ctx, host.Key{Workspace: m.GetWorkspace(), Epoch: m.GetEpoch()},
		host.LogQuery{Follow: m.GetFollow(), Tail: int(m.GetTail())}, lines.add)
	return coded(errors.Join(err, lines.close()))
}

// DialBack asks for more byte-stream connections.
func (s *HostService) DialBack(_ context.Context, req *connect.Request[agentv1.DialBackRequest]) (*connect.Response[agentv1.DialBackResponse], error) {
	n := int(req.Msg.GetCount())
	if n < 1 || n > maxDialBack {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("count must be 1 to 64"))
	}
	if err := s.DialBackFunc(n); err != nil {
		code := connect.CodeUnavailable
		if errors.Is(err, ErrBusy) {
			code = connect.CodeResourceExhausted
		}
		return nil, connect.NewError(code, err)
	}
	return connect.NewResponse(&agentv1.DialBackResponse{}), nil
}

// ResolveImage finds out what a reference stands for.
func (s *HostService) ResolveImage(ctx context.Context, req *connect.Request[agentv1.ResolveImageRequest]) (*connect.Response[agentv1.ResolveImageResponse], error) {
	r, err := s.Machine.ResolveImage(ctx, req.Msg.GetReference())
	if err != nil {
		return nil, coded(err)
	}
	return connect.NewResponse(&agentv1.ResolveImageResponse{
		Digest: r.Digest, Present: r.Present, LocalOnly: r.LocalOnly, RequireCuda: r.RequireCUDA, Labels: validLabels(r.Labels), SizeBytes: r.Bytes,
	}), nil
}

// coded gives a host's error its wire code.
func coded(err error) error {
	if err == nil {
		return nil
	}
	var known *connect.Error
	if errors.As(err, &known) {
		return err
	}
	code := connect.CodeInternal
	switch host.KindOf(err) {
	case host.KindInvalid:
		code = connect.CodeInvalidArgument
	case host.KindStale:
		code = connect.CodeFailedPrecondition
	case host.KindNotFound:
		code = connect.CodeNotFound
	case host.KindConflict:
		code = connect.CodeAborted
	case host.KindDenied:
		code = connect.CodePermissionDenied
	case host.KindNoSpace:
		code = connect.CodeResourceExhausted
	case host.KindUnavailable, host.KindStalled:
		code = connect.CodeUnavailable
		switch {
		case errors.Is(err, context.Canceled):
			code = connect.CodeCanceled
		case errors.Is(err, context.DeadlineExceeded):
			code = connect.CodeDeadlineExceeded
		}
	case host.KindInternal:
	}
	return connect.NewError(code, err)
}

// batcher sends lines together, a moment after the first at the latest. Its calls come from one goroutine; a timer sends
// what waits.
type batcher struct {
	send  func(*agentv1.LogsResponse) error
	turn  chan struct{} // holds one token while the fields below are used
	timer *time.Timer
	batch *agentv1.LogsResponse
	size  int
	err   error
}

func newBatcher(send func(*agentv1.LogsResponse) error) *batcher {
	b := &batcher{send: send, turn: make(chan struct{}, 1), batch: &agentv1.LogsResponse{}}
	b.timer = time.AfterFunc(logBatchWait, func() {
		b.turn <- struct{}{}
		defer func() { <-b.turn }()
		b.flush()
	})
	b.timer.Stop()
	return b
}

func (b *batcher) add(at time.Time, line string) error {
	b.turn <- struct{}{}
	defer func() { <-b.turn }()
	if len(b.batch.GetLines()) == 0 {
		b.timer.Reset(logBatchWait)
	}
	b.batch.Times = append(b.batch.Times, timestamppb.New(at))
	b.batch.Lines = append(b.batch.Lines, line)
	if b.size += len(line); len(b.batch.GetLines()) >= logBatchLines || b.size >= logBatchBytes {
		b.flush()
	}
	return b.err
}

// flush sends what waits. The caller holds the turn.
func (b *batcher) flush() {
	if len(b.batch.GetLines()) == 0 || b.err != nil {
		return
	}
	b.err = b.send(b.batch)
	b.batch, b.size = &agentv1.LogsResponse{}, 0
}

// close sends the rest; nothing is sent after it.
func (b *batcher) close() error {
	b.timer.Stop()
	b.turn <- struct{}{}
	defer func() { <-b.turn }()
	b.flush()
	err := b.err
	if b.err == nil {
		b.err = errors.New("closed")
	}
	return err
}
