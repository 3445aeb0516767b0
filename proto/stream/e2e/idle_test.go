package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/proto/stream"
	"github.com/carrel-dev/carrel/proto/stream/streamtest"
	"github.com/carrel-dev/carrel/services/tunnel"
)

// idleGateway joins each user's stream with the host's stream of the same
// number; both come from another process.
type idleGateway struct {
	rig    *rig
	secure bool
	ca     string
}

func newIdleGateway(t *testing.T, secure bool) *idleGateway {
	g := &idleGateway{secure: secure}
	g.rig = newRig(t, secure, tunnel.Options{MaxPerUser: -1, PoolSize: 2000, MaxWaiting: 2000})
	if secure {
		g.ca = base64.StdEncoding.EncodeToString(g.rig.server.Certificate().Raw)
	}
	return g
}

// startFarEnds lets a child open n tunnels, both ends of them, and waits until
// a byte has gone through each. The result ends the child.
func (g *idleGateway) startFarEnds(t *testing.T, n int) (stop func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestIdleGateway$", "-test.v")
	cmd.Env = append(os.Environ(), "E2E_FAR="+g.rig.server.URL, "E2E_CA="+g.ca, "E2E_N="+strconv.Itoa(n))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() && lines.Text() != "far ends open" {
	}
	before := g.rig.tunnel.Stats().Streams
	if before < n {
		t.Fatalf("%d of %d streams: %s", before, n, lines.Text())
	}
	return func() {
		in.Close()
		_, _ = io.Copy(io.Discard, out)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
}

// farEnds is the child: an agent and n users, all idle once each has had its
// word back.
func farEnds(t *testing.T, gateway string, secure bool) {
	n, err := strconv.Atoi(os.Getenv("E2E_N"))
	if err != nil {
		t.Fatal(err)
	}
	var client *tls.Config
	if secure {
		der, err := base64.StdEncoding.DecodeString(os.Getenv("E2E_CA"))
		if err != nil {
			t.Fatal(err)
		}
		ca, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		client = &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: x509.NewCertPool()}
		client.RootCAs.AddCert(ca)
	}
	a := farAgent(t, gateway, client, int64(n))
	defer func() { _ = a.stop() }()
	streamtest.Eventually(t, "agent is ready", func() bool { return a.State().Ready > 0 })
	for range n {
		c, _, err := stream.Dial(t.Context(), stream.Options{
			URL: gateway + "/attach/w1", TLS: client, Proxy: noProxy, Header: http.Header{"Kind": {"echo"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := echo(c, "a keystroke's worth of bytes, encrypted"); err != nil {
			t.Fatal(err)
		}
	}
	fmt.Println("\nfar ends open")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// farAgent is an agent that echoes by itself.
func farAgent(t *testing.T, gateway string, client *tls.Config, session int64) *running {
	r := &rig{tb: t, client: client}
	return r.agentTo(gateway, session, func(ctx context.Context, _ stream.Hello, conn net.Conn) {
		stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
		defer stop()
		_, _ = io.Copy(struct{ io.Writer }{conn}, conn)
	})
}
