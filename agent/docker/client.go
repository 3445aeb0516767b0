// Package docker is the agent's container engine, by Docker's API.
package docker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/client"

	"github.com/carrel-dev/carrel/agent/host"
)

// DefaultHost is where an engine listens on Linux.
const DefaultHost = "unix:///var/run/docker.sock"

// Options set up a [Client]. Zero values mean the defaults.
type Options struct {
	Host    string        // engine's address; DefaultHost
	Network string        // bridge of all workspaces; `carrel`
	Call    time.Duration // limit of an ordinary call; 10 s
	Slow    time.Duration // limit of making, starting and removing a container; 60 s
	Logs    LogOptions
	NoFile  int64 // open files per process in a workspace, as far as the host gives them; 1,048,576
}

// LogOptions bound what a container's first process can write to the host's disk.
type LogOptions struct {
	MaxSize string // of one file; `10m`
	MaxFile int    // 3
}

func (o *Options) setDefaults() {
	for _, s := range []struct {
		at *string
		d  string
	}{{&o.Host, DefaultHost}, {&o.Network, "carrel"}, {&o.Logs.MaxSize, "10m"}} {
		if *s.at == "" {
			*s.at = s.d
		}
	}
	for _, s := range []struct {
		at *time.Duration
		d  time.Duration
	}{{&o.Call, 10 * time.Second}, {&o.Slow, time.Minute}} {
		if *s.at <= 0 {
			*s.at = s.d
		}
	}
	if o.Logs.MaxFile <= 0 {
		o.Logs.MaxFile = 3
	}
	if o.NoFile <= 0 {
		o.NoFile = 1 << 20
	}
}

// Client talks to one engine.
type Client struct {
	opts Options
	api  *client.Client

	network sync.Mutex // one at a time makes the network

	mu     sync.Mutex
	gpu    gpuMode
	limits *limits // what the engine may give; nil until asked
}

var _ host.Runtime = (*Client)(nil)

// gpuMode is how the engine gives GPUs to containers.
type gpuMode int

const (
	gpuByRequest gpuMode = iota // a device request that nvidia's hook or the engine itself answers
	gpuByCDI
)

// New makes a client; the engine need not be there yet.
func New(opts Options) (*Client, error) {
	opts.setDefaults()
	api, err := client.NewClientWithOpts(client.WithHost(opts.Host), client.WithAPIVersionNegotiation())
	if err != nil {
		return nil, fmt.Errorf("docker client for %s: %w", opts.Host, err)
	}
	return &Client{opts: opts, api: api}, nil
}

// Close closes the connections.
func (c *Client) Close() error { return c.api.Close() }

func (c *Client) call(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, c.opts.Call)
}

func (c *Client) slow(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, c.opts.Slow)
}

// failed gives an engine's error its kind. An error that is not the engine's own answer says nothing about what is there.
func failed(act string, err error) error {
	if err == nil {
		return nil
	}
	var known *host.Error
	kind := host.KindUnavailable
	switch {
	case errors.Is(err, context.Canceled):
		return fmt.Errorf("%s: %w", act, err)
	case errors.As(err, &known):
		return err
	case errors.Is(err, context.DeadlineExceeded), client.IsErrConnectionFailed(err), cerrdefs.IsUnavailable(err):
	case cerrdefs.IsNotFound(err):
		kind = host.KindNotFound
	case cerrdefs.IsConflict(err), cerrdefs.IsAlreadyExists(err):
		kind = host.KindConflict
	case cerrdefs.IsUnauthorized(err), cerrdefs.IsPermissionDenied(err):
		kind = host.KindDenied
	case cerrdefs.IsInvalidArgument(err):
		kind = host.KindInvalid
	case cerrdefs.IsInternal(err), cerrdefs.IsNotImplemented(err), cerrdefs.IsUnknown(err):
		kind = host.KindInternal
	}
	if kind == host.KindInternal && fullDisk(err.Error()) {
		kind = host.KindNoSpace
	}
	return host.Wrap(err, kind, "%s", act)
}
