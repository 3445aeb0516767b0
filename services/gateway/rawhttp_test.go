package gateway_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

func (r *rig) address() string {
	_, address, _ := strings.Cut(r.url, "://")
	return address
}

// rawPost sends a request whose path stands on the wire as given, and returns the status.
func rawPost(t *testing.T, r *rig, path, token string, h2 bool) int {
	t.Helper()
	conn, err := net.Dial("tcp", r.address())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if h2 {
		return rawPostH2(t, conn, path, token)
	}
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n", path, r.address())
	if token != "" {
		fmt.Fprintf(conn, "Authorization: Bearer %s\r\n", token)
	}
	fmt.Fprint(conn, "\r\n{}")
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	defer res.Body.Close()
	return res.StatusCode
}

// rawPostH2 speaks HTTP/2 by hand, since no client sends such paths. A reset stream counts as 400.
func rawPostH2(t *testing.T, conn net.Conn, path, token string) int {
	t.Helper()
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	framer := http2.NewFramer(conn, conn)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	fields := []string{":method", "POST", ":scheme", "http", ":authority", conn.RemoteAddr().String(), ":path", path, "content-type", "application/json"}
	if token != "" {
		fields = append(fields, "authorization", "Bearer "+token)
	}
	for i := 0; i < len(fields); i += 2 {
		if err := encoder.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}); err != nil {
			t.Fatal(err)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(framer.WriteSettings())
	must(framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true}))
	must(framer.WriteData(1, true, []byte("{}")))
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			t.Fatalf("%s over HTTP/2: %v", path, err)
		}
		switch f := frame.(type) {
		case *http2.MetaHeadersFrame:
			var status int
			if _, err := fmt.Sscan(f.PseudoValue("status"), &status); err != nil {
				t.Fatal(err)
			}
			return status
		case *http2.RSTStreamFrame, *http2.GoAwayFrame:
			return http.StatusBadRequest
		}
	}
}
