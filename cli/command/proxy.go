package command

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/proto/stream"
)

// proxyBuffer is what one read takes at most; pipes are set to 1 MiB where the system lets us. Larger reads brought
// nothing, smaller ones cost throughput.
const proxyBuffer = 128 << 10

func newProxy(a *app) *cobra.Command {
	var workspace string
	cmd := &cobra.Command{
		Use:    "proxy --workspace ID",
		Short:  "ssh's ProxyCommand: carries one connection to a workspace over stdin and stdout",
		Hidden: true,
		Args:   exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if workspace == "" {
				return asSSH(usagef("carrel proxy: --workspace is missing"))
			}
			return asSSH(a.proxy(cmd.Context(), workspace))
		},
	}
	cmd.Flags().StringVar(&workspace, "workspace", "", "workspace id or name")
	return cmd
}

// proxy writes nothing to stdout but the bytes of the workspace.
func (a *app) proxy(ctx context.Context, workspace string) error {
	api, err := a.connect()
	if err != nil {
		return err
	}
	conn, err := api.openStream(ctx, workspace)
	if err != nil {
		return err
	}
	in, out := a.sys.Stdio()
	return carry(ctx, conn, in, out, api.timeout.Drain)
}

// openStream gets a ticket and turns it into a connection to the workspace's SSH server.
func (c *api) openStream(ctx context.Context, workspace string) (net.Conn, error) {
	resp, err := c.attach.CreateTicket(ctx, connect.NewRequest(&carrelv1.CreateTicketRequest{
		Workspace: workspace, Kind: carrelv1.StreamKind_STREAM_KIND_SSH,
	}))
	if err != nil {
		return nil, err
	}
	defer c.http.CloseIdleConnections() // the call's connection has no further use
	conn, _, err := stream.Dial(ctx, stream.Options{
		URL:     c.dep.Gateway + "/carrel/attach",
		Header:  http.Header{"Carrel-Ticket": {resp.Msg.GetTicket()}, "User-Agent": {"carrel/" + c.version}},
		TLS:     c.tls,
		Proxy:   c.proxy,
		Timeout: c.timeout.Connect,
	})
	if err != nil {
		return nil, c.statusError(err)
	}
	return conn, nil
}

// carry moves bytes both ways until the workspace's side ends. After stdin has ended, the workspace has drain to end too.
func carry(ctx context.Context, conn net.Conn, in io.Reader, out io.Writer, drain time.Duration) error {
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	up := make(chan error, 1)
	// This goroutine may stay in a read of stdin, which cannot be interrupted; the process ends with carry.
	go func() {
		_, err := io.CopyBuffer(onlyWriter{conn}, onlyReader{in}, make([]byte, proxyBuffer))
		if half, ok := conn.(interface{ CloseWrite() error }); ok && err == nil {
			err = half.CloseWrite()
		}
		_ = conn.SetReadDeadline(time.Now().Add(drain))
		up <- err
	}()
	_, err := io.CopyBuffer(onlyWriter{out}, onlyReader{conn}, make([]byte, proxyBuffer))
	select {
	case upErr := <-up:
		if err == nil || isTimeout(err) {
			err = upErr
		}
	default:
	}
	switch {
	case ctx.Err() != nil:
		return failf(exitSSH, "interrupted")
	case err == nil, errors.Is(err, syscall.EPIPE), errors.Is(err, net.ErrClosed):
		return nil // the one or the other side hung up
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.ErrUnexpectedEOF):
		return failf(exitSSH, "the connection to the workspace was cut")
	default:
		return failf(exitSSH, "the connection to the workspace failed: %s", message(err))
	}
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// onlyReader and onlyWriter keep io.CopyBuffer from shortcuts that would not use the buffer.
type onlyReader struct{ io.Reader }

type onlyWriter struct{ io.Writer }
