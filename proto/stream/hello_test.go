package stream

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func TestHelloReadsBackAndTakesNoByteMore(t *testing.T) {
	want := Hello{
		Version: 1, Workspace: "w7k", Epoch: 3, Kind: "ssh", Nonce: "n", ResumeID: "r",
		Offset: 1 << 40, User: "ü", Target: "8888",
	}
	var b bytes.Buffer
	if err := WriteHello(&b, want); err != nil {
		t.Fatal(err)
	}
	b.WriteString("SSH-2.0-x\r\n")
	r := bytes.NewReader(b.Bytes())
	got, err := ReadHello(iotest.OneByteReader(r))
	if err != nil || got != want {
		t.Fatalf("got %+v, %v", got, err)
	}
	rest, _ := io.ReadAll(r)
	if string(rest) != "SSH-2.0-x\r\n" {
		t.Fatalf("behind the hello: %q", rest)
	}
}

func TestHelloRefusesToWriteWhatCannotBeRead(t *testing.T) {
	for name, h := range map[string]Hello{
		"too long": {Target: strings.Repeat("x", MaxHello)},
		"negative": {Epoch: -1},
		"offset":   {Offset: -1},
		"not text": {Kind: "\xff"},
	} {
		var b bytes.Buffer
		if err := WriteHello(&b, h); !errors.Is(err, ErrBadHello) || b.Len() != 0 {
			t.Errorf("%s: %v, %d bytes written", name, err, b.Len())
		}
	}
}

func TestHelloRefusesBadBytes(t *testing.T) {
	for name, in := range map[string]string{
		"other protocol": "SSH-2.0-OpenSSH",
		"huge length":    helloMagic + "\xff\xff\xff\xff",
		"no version":     helloMagic + "\x00\x00\x00\x00",
		"version 0":      helloMagic + "\x00\x00\x00\x02\x01\x00",
		"twice":          helloMagic + "\x00\x00\x00\x04\x01\x01\x01\x01",
		"field cut":      helloMagic + "\x00\x00\x00\x04\x01\x01\x10\x09",
		"endless varint": helloMagic + "\x00\x00\x00\x02\xff\xff",
		"not text":       helloMagic + "\x00\x00\x00\x05\x01\x01\x10\x01\xff",
	} {
		if h, err := ReadHello(strings.NewReader(in)); !errors.Is(err, ErrBadHello) {
			t.Errorf("%s: %+v, %v", name, h, err)
		}
	}
	if _, err := ReadHello(strings.NewReader("")); err != io.EOF {
		t.Errorf("empty: %v", err)
	}
	if _, err := ReadHello(strings.NewReader(helloMagic + "\x00\x00\x00\x09\x01")); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut: %v", err)
	}
}

func TestHelloOfALaterVersionIsRead(t *testing.T) {
	// version 9, an unknown number (tag 7), an unknown string (tag 99), kind "x"
	in := helloMagic + "\x00\x00\x00\x0b\x01\x09\x07\x05\x63\x02hi\x11\x01x"
	h, err := ReadHello(strings.NewReader(in))
	if err != nil || h != (Hello{Version: 9, Kind: "x"}) {
		t.Fatalf("%+v, %v", h, err)
	}
}

func FuzzReadHello(f *testing.F) {
	var b bytes.Buffer
	_ = WriteHello(&b, Hello{Workspace: "w", Epoch: 1, Kind: "ssh", Offset: 9, User: "u"})
	f.Add(b.Bytes())
	f.Add([]byte(helloMagic + "\x00\x00\x00\x02\x01\x01rest"))
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		h, err := ReadHello(r)
		if took := len(in) - r.Len(); took > MaxHello {
			t.Fatalf("took %d bytes", took)
		}
		if err != nil {
			return
		}
		var out bytes.Buffer
		if err := WriteHello(&out, h); err != nil {
			t.Fatalf("cannot write what was read: %+v: %v", h, err)
		}
		if back, err := ReadHello(&out); err != nil || back != h {
			t.Fatalf("%+v became %+v, %v", h, back, err)
		}
	})
}
