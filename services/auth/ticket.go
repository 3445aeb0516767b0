package auth

import (
	"sync"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Tickets are short-lived, single-use permissions that live in the gateway's memory only.
type Tickets[T any] struct {
	life time.Duration
	most int

	mu   sync.Mutex
	open map[string]ticket[T] // by hash of the text
}

type ticket[T any] struct {
	value   T
	expires time.Time
}

// NewTickets returns a set whose tickets are good for life, at most most at once.
func NewTickets[T any](life time.Duration, most int) *Tickets[T] {
	return &Tickets[T]{life: life, most: most, open: map[string]ticket[T]{}}
}

// Issue makes a ticket. KindExhausted when too many are open.
func (t *Tickets[T]) Issue(value T, now time.Time) (text string, expires time.Time, err error) {
	code := NewCode()
	expires = now.Add(t.life)
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.open) >= t.most {
		for k, v := range t.open {
			if !now.Before(v.expires) {
				delete(t.open, k)
			}
		}
	}
	if len(t.open) >= t.most {
		return "", time.Time{}, fleet.Errorf(fleet.KindExhausted, "too many streams are being opened at once; try again in %s", t.life)
	}
	t.open[string(code.Hash)] = ticket[T]{value: value, expires: expires}
	return code.Text, expires, nil
}

// Use takes a ticket; it is good for one use. KindUnauthenticated.
func (t *Tickets[T]) Use(text string, now time.Time) (T, error) {
	key := string(Hash(text))
	t.mu.Lock()
	found, ok := t.open[key]
	delete(t.open, key)
	t.mu.Unlock()
	if !ok || !now.Before(found.expires) {
		var zero T
		return zero, fleet.Errorf(fleet.KindUnauthenticated, "this ticket is used up or too old; try again")
	}
	return found.value, nil
}
