package stream

import (
	"context"
	"crypto/tls"
	"io"
	"math/rand/v2"
	"net"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/carrel-dev/carrel/proto/stream/streamtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is two ends of one connection.
type pair struct{ near, far net.Conn }

func tcpPair(tb testing.TB) pair  { return listenPair(tb, "tcp", "127.0.0.1:0") }
func unixPair(tb testing.TB) pair { return listenPair(tb, "unix", filepath.Join(tb.TempDir(), "s")) }

func listenPair(tb testing.TB, network, addr string) pair {
	tb.Helper()
	l, err := net.Listen(network, addr)
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	near, err := net.Dial(network, l.Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	far, err := l.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { near.Close(); far.Close() })
	return pair{near, far}
}

// tlsPair has the client's end near.
func tlsPair(tb testing.TB) pair {
	tb.Helper()
	server, client := streamtest.TLS(tb)
	client.ServerName = "localhost"
	raw := tcpPair(tb)
	p := pair{tls.Client(raw.near, client), tls.Server(raw.far, server)}
	errs := make(chan error, 1)
	go func() { errs <- p.far.(*tls.Conn).HandshakeContext(context.Background()) }()
	if err := p.near.(*tls.Conn).HandshakeContext(context.Background()); err != nil {
		tb.Fatal(err)
	}
	if err := <-errs; err != nil {
		tb.Fatal(err)
	}
	return p
}

var pairKinds = map[string]func(testing.TB) pair{"tcp": tcpPair, "unix": unixPair, "tls": tlsPair}

// noise is n reproducible bytes.
func noise(seed uint64, n int) []byte {
	var s [32]byte
	s[0] = byte(seed)
	b := make([]byte, n)
	_, _ = rand.NewChaCha8(s).Read(b)
	return b
}

// sendAll writes p, half-closes, and reports.
func sendAll(c net.Conn, p []byte) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := c.Write(p)
		if err == nil {
			err = c.(closeWriter).CloseWrite()
		}
		done <- err
	}()
	return done
}

type readResult struct {
	data []byte
	err  error
}

func readAll(c net.Conn) <-chan readResult {
	done := make(chan readResult, 1)
	go func() {
		b, err := io.ReadAll(c)
		done <- readResult{b, err}
	}()
	return done
}
