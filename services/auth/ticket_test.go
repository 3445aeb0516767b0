package auth_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func TestTicketIsGoodOnceAndNotForLong(t *testing.T) {
	tickets := auth.NewTickets[string](30*time.Second, 10)
	text, expires, err := tickets.Issue("demo", noon)
	if err != nil || !expires.Equal(noon.Add(30*time.Second)) {
		t.Fatalf("issue: %v %v", expires, err)
	}
	if value, err := tickets.Use(text, expires.Add(-time.Millisecond)); err != nil || value != "demo" {
		t.Errorf("use: %q, %v", value, err)
	}
	if value, err := tickets.Use(text, noon); !fleet.IsKind(err, fleet.KindUnauthenticated) || value != "" {
		t.Errorf("used twice: %q, %v", value, err)
	}
	late, expires, err := tickets.Issue("late", noon)
	if err != nil {
		t.Fatal(err)
	}
	if value, err := tickets.Use(late, expires); !fleet.IsKind(err, fleet.KindUnauthenticated) || value != "" {
		t.Errorf("too late: %q, %v", value, err)
	}
	for _, text := range []string{"", "x", text + "x", string(auth.Hash(text))} {
		if _, err := tickets.Use(text, noon); !fleet.IsKind(err, fleet.KindUnauthenticated) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestTicketsAreBoundedAndExpiredOnesMakeRoom(t *testing.T) {
	tickets := auth.NewTickets[int](time.Minute, 3)
	for i := range 3 {
		if _, _, err := tickets.Issue(i, noon); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := tickets.Issue(4, noon.Add(59*time.Second)); !fleet.IsKind(err, fleet.KindExhausted) {
		t.Errorf("a fourth: %v", err)
	}
	if _, _, err := tickets.Issue(4, noon.Add(time.Minute)); err != nil {
		t.Errorf("after the others expired: %v", err)
	}
}

func TestOneOfManyGetsATicket(t *testing.T) {
	tickets := auth.NewTickets[string](time.Minute, 100)
	for range 50 {
		text, _, err := tickets.Issue("x", noon)
		if err != nil {
			t.Fatal(err)
		}
		var won atomic.Int32
		var group sync.WaitGroup
		for range 16 {
			group.Go(func() {
				if _, err := tickets.Use(text, noon); err == nil {
					won.Add(1)
				}
			})
		}
		group.Wait()
		if won.Load() != 1 {
			t.Fatalf("%d uses of one ticket", won.Load())
		}
	}
}

func TestChallenges(t *testing.T) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	otherPublic, otherPrivate, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	challenges := auth.NewChallenges(100)
	for name, c := range map[string]struct {
		host      string // that proves
		sign      func(nonce []byte) []byte
		key       ed25519.PublicKey
		after     time.Duration
		ok        bool
		spend     bool // the nonce was used before
		otherText bool // the nonce is another one
	}{
		"good":                 {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h1", n)) }, key: public, ok: true},
		"last moment":          {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h1", n)) }, key: public, after: 30*time.Second - 1, ok: true},
		"too late":             {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h1", n)) }, key: public, after: 30 * time.Second},
		"replayed":             {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h1", n)) }, key: public, spend: true},
		"another host's nonce": {host: "h2", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h2", n)) }, key: public},
		"signed for another":   {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h2", n)) }, key: public},
		"wrong key":            {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(otherPrivate, auth.Proof("h1", n)) }, key: public},
		"other host's key":     {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h1", n)) }, key: otherPublic},
		"no label":             {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, n) }, key: public},
		"no signature":         {host: "h1", sign: func([]byte) []byte { return nil }, key: public},
		"no key":               {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h1", n)) }, key: nil},
		"short key":            {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h1", n)) }, key: public[:31]},
		"made-up nonce":        {host: "h1", sign: func(n []byte) []byte { return ed25519.Sign(private, auth.Proof("h1", n)) }, key: public, otherText: true},
	} {
		t.Run(name, func(t *testing.T) {
			nonce, err := challenges.Issue("h1", noon)
			if err != nil || len(nonce) != 32 {
				t.Fatalf("nonce of %d bytes, %v", len(nonce), err)
			}
			if c.spend {
				if err := challenges.Verify("h1", nonce, c.sign(nonce), c.key, noon); err != nil {
					t.Fatal(err)
				}
			}
			if c.otherText {
				nonce = make([]byte, 32)
			}
			err = challenges.Verify(c.host, nonce, c.sign(nonce), c.key, noon.Add(c.after))
			if (err == nil) != c.ok || (err != nil && !fleet.IsKind(err, fleet.KindUnauthenticated)) {
				t.Errorf("got %v", err)
			}
			if err := challenges.Verify("h1", nonce, ed25519.Sign(private, auth.Proof("h1", nonce)), public, noon); err == nil && !c.otherText {
				t.Error("the nonce is still good after a try")
			}
		})
	}
	if !strings.HasPrefix(string(auth.Proof("h1", []byte("n"))), "carrel-link-v1\nh1\n") {
		t.Error("the proof has no label of its own")
	}
}
