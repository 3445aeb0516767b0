package control

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
)

func TestRendezvousHandsOutAPair(t *testing.T) {
	serve, sessions, err := Rendezvous()
	if err != nil {
		t.Fatal(err)
	}
	defer sessions.Close()
	mine, err := Summon(int(sessions.Fd())) // serve may be away: the request waits
	if err != nil {
		t.Fatal(err)
	}
	defer mine.Close()
	conn, err := net.FileConn(serve)
	if err != nil {
		t.Fatal(err)
	}
	serve.Close()
	defer conn.Close()
	caller, err := Receive(conn.(*net.UnixConn))
	if err != nil {
		t.Fatal(err)
	}
	defer caller.Conn.Close()
	if caller.PID != os.Getpid() || caller.UID != os.Getuid() {
		t.Errorf("caller is %d, uid %d", caller.PID, caller.UID)
	}
	if err := mine.Send(ToServe{Hello: &Hello{ID: "x"}}); err != nil {
		t.Fatal(err)
	}
	var got ToServe
	if err := caller.Conn.Receive(&got); err != nil || got.Hello == nil || got.Hello.ID != "x" {
		t.Errorf("%+v %v", got, err)
	}
	mine.Close()
	if err := caller.Conn.Receive(&got); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
}

func TestFullRendezvousDoesNotBlock(t *testing.T) {
	serve, sessions, err := Rendezvous()
	if err != nil {
		t.Fatal(err)
	}
	defer serve.Close()
	defer sessions.Close()
	for range 10000 {
		conn, err := Summon(int(sessions.Fd()))
		if errors.Is(err, ErrBusy) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
	t.Error("10,000 requests were taken that nobody reads")
}

func TestOversizedMessagesAreRefused(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if err := NewConn(a).Send(ToServe{Hello: &Hello{ID: strings.Repeat("x", MaxMessage)}}); err == nil {
		t.Error("sent")
	}
	go func() { _, _ = b.Write([]byte{0xff, 0xff, 0xff, 0xff}) }()
	var got ToServe
	if err := NewConn(a).Receive(&got); err == nil || !strings.Contains(err.Error(), "the most is") {
		t.Errorf("got %v", err)
	}
}
