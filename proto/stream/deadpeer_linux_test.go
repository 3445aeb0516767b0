package stream

import (
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// T-31, REL-14: what the kernel is told, and that it does as told to a peer
// whose packets are lost both ways without a word.
func TestDeadPeerSettingsReachTheSocket(t *testing.T) {
	for name, kind := range map[string]func(testing.TB) pair{"tcp": tcpPair, "tls": tlsPair} {
		c := kind(t).near
		if err := SetDeadPeer(c, 0); err != nil {
			t.Fatal(err)
		}
		got := map[int]int{}
		rc, err := bottom(c).(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		options := map[int]int{syscall.TCP_KEEPIDLE: 15, syscall.TCP_KEEPINTVL: 8, syscall.TCP_KEEPCNT: 4, tcpUserTimeout: 37500}
		_ = rc.Control(func(fd uintptr) {
			for o := range options {
				got[o], _ = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, o)
			}
		})
		for o, want := range options {
			if got[o] != want {
				t.Errorf("%s: option %d is %d, want %d", name, o, got[o], want)
			}
		}
	}
}

func TestAVanishedPeerIsFoundOutIdleAndBusy(t *testing.T) {
	for name, busy := range map[string]bool{"idle": false, "unacknowledged": true} {
		t.Run(name, func(t *testing.T) {
			p := tcpPair(t)
			if err := SetDeadPeer(p.near, 3*time.Second); err != nil {
				t.Fatal(err)
			}
			dropBetween(t, p)
			if busy {
				if _, err := p.near.Write([]byte("is anybody there?")); err != nil {
					t.Fatal(err)
				}
			}
			start := time.Now()
			_ = p.near.SetReadDeadline(start.Add(15 * time.Second))
			_, err := p.near.Read(make([]byte, 1))
			if d := time.Since(start); !errors.Is(err, syscall.ETIMEDOUT) || err == io.EOF || d > 6*time.Second {
				t.Errorf("after %v: %v", d, err)
			}
		})
	}
}

// dropBetween loses all packets of one connection, in both directions.
func dropBetween(t *testing.T, p pair) {
	t.Helper()
	if _, err := exec.LookPath("iptables"); err != nil || os.Geteuid() != 0 {
		t.Skip("dropping packets takes root and iptables")
	}
	near := strconv.Itoa(p.near.LocalAddr().(*net.TCPAddr).Port)
	far := strconv.Itoa(p.far.LocalAddr().(*net.TCPAddr).Port)
	for _, ports := range [][2]string{{near, far}, {far, near}} {
		rule := strings.Fields("INPUT -i lo -p tcp --sport " + ports[0] + " --dport " + ports[1] + " -j DROP")
		if out, err := exec.Command("iptables", append([]string{"-w", "-I"}, rule...)...).CombinedOutput(); err != nil {
			t.Fatalf("iptables: %v: %s", err, out)
		}
		t.Cleanup(func() { _ = exec.Command("iptables", append([]string{"-w", "-D"}, rule...)...).Run() })
	}
}
