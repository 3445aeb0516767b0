// Package hostclient calls agents over the connections that they opened, in the gateway's own words and on its own time line.
package hostclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/agent/v1/agentv1connect"
	"github.com/carrel-dev/carrel/services/fleet"
)

// Links finds the way to a host.
type Links interface {
	// Client returns a client whose calls go to the host, or an error when it has no link.
	Client(hostID string) (*http.Client, error)
}

// Identities gives runs their SSH host identity.
type Identities interface {
	// SSHIdentity returns a host key as an OpenSSH private key file, and its certificate in authorized_keys form.
	SSHIdentity(w fleet.Workspace) (hostKey []byte, certificate string, err error)
}

// Settings are the client's times and bounds. The zero value of a field means its default.
type Settings struct {
	Deployment     string        // its name, for agents' messages
	ObserveWait    time.Duration // how long one Observe stream lasts; default and most 10 s
	ObserveGrace   time.Duration // how much longer it may be silent before it counts as lost; default 10 s
	ResolveTimeout time.Duration // of one image look-up on one host; default 20 s
	MaxReadBytes   int           // largest message taken from an agent; default 16 MiB
}

func (s Settings) withDefaults() Settings {
	s.ObserveWait = cmp.Or(s.ObserveWait, 10*time.Second)
	s.ObserveGrace = cmp.Or(s.ObserveGrace, 10*time.Second)
	s.ResolveTimeout = cmp.Or(s.ResolveTimeout, 20*time.Second)
	s.MaxReadBytes = cmp.Or(s.MaxReadBytes, 16<<20)
	return s
}

// Client calls agents. It holds no state of its own.
type Client struct {
	links      Links
	identities Identities
	now        func() time.Time // gateway time
	set        Settings
}

// New returns a client.
func New(links Links, identities Identities, now func() time.Time, settings Settings) *Client {
	return &Client{links: links, identities: identities, now: now, set: settings.withDefaults()}
}

// host returns the generated client of a host. Compression is off: what goes over the link is small, or does not compress.
func (c *Client) host(id fleet.HostID) (agentv1connect.HostServiceClient, error) {
	client, err := c.links.Client(string(id))
	if err != nil {
		return nil, fleet.Wrap(err, fleet.KindUnavailable, "the host does not answer now; try again")
	}
	return agentv1connect.NewHostServiceClient(client, "http://host", connect.WithReadMaxBytes(c.set.MaxReadBytes), connect.WithAcceptCompression("gzip", nil, nil)), nil
}

// Apply sends the full desired state of a host. KindConflict: the host has seen a newer stamp.
func (c *Client) Apply(ctx context.Context, desired fleet.DesiredHost) error {
	client, err := c.host(desired.Host)
	if err != nil {
		return err
	}
	request, err := c.applyRequest(desired)
	if err != nil {
		return err
	}
	_, err = client.Apply(ctx, connect.NewRequest(request))
	return wrap(err, "apply")
}

// Observe calls each for every batch after a sequence number, until the host ends the stream (nil), the link is lost, or each fails.
func (c *Client) Observe(ctx context.Context, host fleet.HostID, after int64, each func(fleet.Observation) error) error {
	client, err := c.host(host)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	limit := c.set.ObserveWait + c.set.ObserveGrace
	watch := time.AfterFunc(limit, func() { cancel(errSilent) })
	defer watch.Stop()
	stream, err := client.Observe(ctx, connect.NewRequest(&agentv1.ObserveRequest{AfterSeq: after, MaxWait: durationpb.New(c.set.ObserveWait)}))
	if err != nil {
		return wrap(causeOf(ctx, err), "observe")
	}
	defer func() { _ = stream.Close() }() // what it could say, Err has said
	for stream.Receive() {
		watch.Stop() // committing is our time, not the host's
		observation := c.observation(host, stream.Msg())
		if err := each(observation); err != nil {
			return err
		}
		watch.Reset(limit)
	}
	return wrap(causeOf(ctx, stream.Err()), "observe")
}

// errSilent is the cause when a host's stream neither said anything nor ended in its time.
var errSilent = errors.New("the host sends nothing and does not end the stream")

func causeOf(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errSilent) {
		return errSilent
	}
	return err
}

// Sample returns the latest measurements, times on the gateway's time line.
func (c *Client) Sample(ctx context.Context, host fleet.HostID) ([]fleet.Sample, error) {
	client, err := c.host(host)
	if err != nil {
		return nil, err
	}
	response, err := client.Sample(ctx, connect.NewRequest(&agentv1.SampleRequest{}))
	if err != nil {
		return nil, wrap(err, "sample")
	}
	return samples(response.Msg.GetDevices(), c.now()), nil
}

// ResolveImage asks a host what a reference stands for. KindNotFound when neither it nor the registry has it.
func (c *Client) ResolveImage(ctx context.Context, host fleet.HostID, reference string) (fleet.ResolvedImage, error) {
	client, err := c.host(host)
	if err != nil {
		return fleet.ResolvedImage{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.set.ResolveTimeout)
	defer cancel()
	response, err := client.ResolveImage(ctx, connect.NewRequest(&agentv1.ResolveImageRequest{Reference: reference}))
	if err != nil {
		return fleet.ResolvedImage{}, wrap(err, "resolve image")
	}
	m := response.Msg
	return fleet.ResolvedImage{
		Digest: m.GetDigest(), Present: m.GetPresent(), LocalOnly: m.GetLocalOnly(), RequireCUDA: m.GetRequireCuda(), Labels: m.GetLabels(), SizeBytes: m.GetSizeBytes(),
	}, nil
}

// DialBack asks a host for more byte-stream connections.
func (c *Client) DialBack(ctx context.Context, host fleet.HostID, count int) error {
	client, err := c.host(host)
	if err != nil {
		return err
	}
	_, err = client.DialBack(ctx, connect.NewRequest(&agentv1.DialBackRequest{Count: int32(min(max(count, 1), 64))}))
	return wrap(err, "dial back")
}

// LogLine is one line that a run's first process wrote.
type LogLine struct {
	At   time.Time // host's clock
	Text string
}

// LogsQuery chooses lines of a run.
type LogsQuery struct {
	Run    fleet.RunKey
	Follow bool
	Tail   int // last lines to begin with; 0: all
}

// Logs calls each for every batch of lines, until the host ends the stream (nil) or each fails.
func (c *Client) Logs(ctx context.Context, host fleet.HostID, q LogsQuery, each func([]LogLine) error) error {
	client, err := c.host(host)
	if err != nil {
		return err
	}
	stream, err := client.Logs(ctx, connect.NewRequest(&agentv1.LogsRequest{
		Workspace: string(q.Run.Workspace), Epoch: q.Run.Epoch, Follow: q.Follow, Tail: int32(min(max(q.Tail, 0), 1<<30)),
	}))
	if err != nil {
		return wrap(err, "logs")
	}
	defer func() { _ = stream.Close() }() // as in Observe
	for stream.Receive() {
		m := stream.Msg()
		lines := make([]LogLine, len(m.GetLines()))
		for i, text := range m.GetLines() {
			lines[i].Text = text
			if i < len(m.GetTimes()) {
				lines[i].At = m.GetTimes()[i].AsTime()
			}
		}
		if err := each(lines); err != nil {
			return err
		}
	}
	return wrap(stream.Err(), "logs")
}

// kinds is what an agent's codes mean to us; what is not here is internal.
func kind(code connect.Code) fleet.Kind {
	switch code {
	case connect.CodeNotFound:
		return fleet.KindNotFound
	case connect.CodeFailedPrecondition, connect.CodeAborted:
		return fleet.KindConflict
	case connect.CodeInvalidArgument:
		return fleet.KindInvalid
	case connect.CodeResourceExhausted:
		return fleet.KindExhausted
	case connect.CodePermissionDenied:
		return fleet.KindForbidden
	case connect.CodeAlreadyExists:
		return fleet.KindExists
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeCanceled, connect.CodeUnknown:
		return fleet.KindUnavailable
	default:
		return fleet.KindInternal
	}
}

// wrap gives an agent's error its kind; the agent's own message is for people.
func wrap(err error, act string) error {
	if err == nil || errors.Is(err, io.EOF) {
		return nil
	}
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return fleet.Wrap(err, fleet.KindUnavailable, "the host does not answer now; try again")
	}
	k := kind(ce.Code())
	if (k == fleet.KindUnavailable || k == fleet.KindInternal) && !connect.IsWireError(ce) { // the link, not the agent, says so
		return fleet.Wrap(fmt.Errorf("%s: %w", act, err), fleet.KindUnavailable, "the host does not answer now; try again")
	}
	return fleet.Wrap(fmt.Errorf("%s: %w", act, err), k, "%s", ce.Message())
}
