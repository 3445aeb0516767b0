package preamble

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestReadsBackAndTakesNoByteMore(t *testing.T) {
	for _, p := range []Preamble{{Kind: Control}, {Kind: Stream, Nonce: "abc"}} {
		var b bytes.Buffer
		if err := Write(&b, p); err != nil {
			t.Fatal(err)
		}
		b.WriteString("rest")
		p.Version = Version
		got, err := Read(&b)
		if err != nil || got != p || b.String() != "rest" {
			t.Errorf("%+v %v, left %q", got, err, b.String())
		}
	}
	if err := Write(io.Discard, Preamble{Kind: Stream, Nonce: strings.Repeat("x", 200)}); err == nil {
		t.Error("a long nonce was written")
	}
}

func TestBadLines(t *testing.T) {
	for _, line := range []string{
		"\n", "GET / HTTP/1.1\r\n", "carrel-init/0 control\n", "carrel-init/1\n", "carrel-init/1 stream\n", "carrel-init/1 control x\n",
		"carrel-init/1 other\n", "carrel-init/x control\n", strings.Repeat("a", 1000) + "\n",
	} {
		if p, err := Read(strings.NewReader(line)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %+v %v", line, p, err)
		}
	}
	if _, err := Read(strings.NewReader("carrel-init/1 con")); !errors.Is(err, io.EOF) {
		t.Error("a cut line was taken")
	}
	if p, err := Read(strings.NewReader("carrel-init/7 control\n")); err != nil || p.Version != 7 {
		t.Errorf("a later version: %+v %v", p, err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte("carrel-init/1 stream abc\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := Read(bytes.NewReader(data))
		if err == nil && p.Kind != Control && p.Kind != Stream {
			t.Errorf("%+v", p)
		}
	})
}
