package stream

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

const acceptWriteTimeout = 10 * time.Second // for the few bytes of the 101

// ErrNotUpgrade says that a request did not ask for a stream; it has been
// answered.
var ErrNotUpgrade = errors.New("stream: request does not upgrade to " + Protocol)

// IsUpgrade reports whether r asks for a stream in the way that Accept takes.
func IsUpgrade(r *http.Request) bool {
	return hasToken(r.Header, "Connection", "upgrade") && hasToken(r.Header, "Upgrade", Protocol)
}

// Accept answers an upgrade with 101 (and the headers already set on w) and
// returns the connection, which is the caller's from then on: the handler may
// return and need not close it. The connection is the server's own
// (*net.TCPConn or *tls.Conn) unless the client has sent more than its request
// already. On error the request has been answered: 505 where it is HTTP/2,
// which cannot be upgraded, 426 where it asks for no stream.
func Accept(w http.ResponseWriter, r *http.Request) (net.Conn, error) {
	if r.ProtoMajor != 1 || r.ProtoMinor == 0 {
		http.Error(w, "a byte stream needs HTTP/1.1 between you and the gateway; this request came as "+r.Proto,
			http.StatusHTTPVersionNotSupported)
		return nil, fmt.Errorf("%w: %s", ErrNotUpgrade, r.Proto)
	}
	if !IsUpgrade(r) || r.Method != http.MethodGet {
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", Protocol)
		http.Error(w, "this address takes only GET with Upgrade: "+Protocol+
			"; if you sent that, a proxy on the way removed it", http.StatusUpgradeRequired)
		return nil, ErrNotUpgrade
	}
	header := w.Header().Clone()
	conn, buf, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, "the server cannot hand over this connection", http.StatusInternalServerError)
		return nil, fmt.Errorf("hijack: %w", err)
	}
	early, err := io.ReadAll(io.LimitReader(buf, int64(buf.Reader.Buffered())))
	if err == nil {
		err = writeSwitch(conn, header)
	}
	if err == nil {
		err = SetDeadPeer(conn, 0)
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("answer upgrade: %w", err)
	}
	if len(early) > 0 {
		return &prefixConn{Conn: conn, prefix: early}, nil
	}
	return conn, nil
}

func writeSwitch(conn net.Conn, header http.Header) error {
	header.Set("Connection", "Upgrade")
	header.Set("Upgrade", Protocol)
	var b bytes.Buffer
	b.WriteString("HTTP/1.1 101 Switching Protocols\r\n")
	if err := header.Write(&b); err != nil {
		return err
	}
	b.WriteString("\r\n")
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	if err := conn.SetWriteDeadline(time.Now().Add(acceptWriteTimeout)); err != nil {
		return err
	}
	if _, err := conn.Write(b.Bytes()); err != nil {
		return err
	}
	return conn.SetWriteDeadline(time.Time{})
}

// hasToken reports whether one of the comma-separated values of key is token.
func hasToken(h http.Header, key, token string) bool {
	for _, line := range h.Values(key) {
		for part := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
	}
	return false
}
