//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// echoes are open sessions that send back each byte, one for each path.
type echoes struct {
	names    []string
	sessions []*rig.Session
}

// openEchoes opens a session on each path and waits until it answers.
func openEchoes(ctx context.Context, paths []rig.Path) (*echoes, error) {
	e := &echoes{}
	for _, p := range paths {
		s, err := rig.Open(ctx, p.SSH("cat"), p.Env)
		if err != nil {
			e.close()
			return nil, err
		}
		e.names, e.sessions = append(e.names, p.Name), append(e.sessions, s)
		if _, err := echo(s); err != nil {
			e.close()
			return nil, fmt.Errorf("%s: %w", p.Name, err)
		}
	}
	return e, nil
}

func (e *echoes) close() {
	for _, s := range e.sessions {
		s.Abort()
	}
}

// echo sends one byte and returns how long it took to come back.
func echo(s *rig.Session) (time.Duration, error) {
	one := [1]byte{'.'}
	began := time.Now()
	if _, err := s.In.Write(one[:]); err != nil {
		return 0, errors.Join(err, s.Close())
	}
	if _, err := io.ReadFull(s.Out, one[:]); err != nil {
		return 0, errors.Join(err, s.Close())
	}
	return time.Since(began), nil
}

// block is how many round trips one path has before the next one's turn.
const block = 50

// measure returns milliseconds by path and round; calm is called before each round.
func (e *echoes) measure(ctx context.Context, rounds, trips int, calm func(context.Context) error) (map[string][][]float64, error) {
	took := map[string][][]float64{}
	for _, n := range e.names {
		took[n] = make([][]float64, rounds)
	}
	order := make([]int, len(e.names))
	for i := range order {
		order[i] = i
	}
	for round := range rounds {
		if err := calm(ctx); err != nil {
			return nil, err
		}
		for done := 0; done < trips; done += block {
			for _, i := range rotated(order, done/block) {
				for range block {
					if err := ctx.Err(); err != nil {
						return nil, err
					}
					d, err := echo(e.sessions[i])
					if err != nil {
						return nil, fmt.Errorf("%s: %w", e.names[i], err)
					}
					took[e.names[i]][round] = append(took[e.names[i]][round], milliseconds(d))
				}
			}
		}
	}
	return took, nil
}

// quantiles returns the quantile of each round.
func quantiles(rounds [][]float64, q float64) []float64 {
	out := make([]float64, len(rounds))
	for i, r := range rounds {
		out[i] = quantile(r, q)
	}
	return out
}

// tripRow compares one quantile of two paths, round by round.
func tripRow(bench, what string, took map[string][][]float64, q float64, subject, peer string) row {
	s, p := quantiles(took[subject], q), quantiles(took[peer], q)
	each := ratios(s, p)
	return row{
		Bench: bench, What: fmt.Sprintf("%s, p%.0f time against %s", what, 100*q, peer), Ratio: median(each),
		Subject: fmt.Sprintf("%.3f ms", median(s)), Peer: fmt.Sprintf("%.3f ms", median(p)),
	}.within(each)
}

// bulkFlows is how much a download must have brought before it counts as running.
const bulkFlows = 8 << 20

// bulk keeps downloads running until stop, to see what they do to a keystroke next to them. Each command writes without
// end; its bytes go to /dev/null without passing this program.
func bulk(ctx context.Context, commands [][]string, env []string) (stop func(), err error) {
	var running []*rig.Process
	stop = func() {
		for _, p := range running {
			p.Kill()
		}
	}
	for _, argv := range commands {
		p, err := rig.Start("download", os.DevNull, env, argv...)
		if err != nil {
			stop()
			return nil, err
		}
		running = append(running, p)
	}
	for _, p := range running {
		err := rig.Poll(ctx, 30*time.Second, func(context.Context) (bool, error) {
			n, err := rig.Written(p.PID())
			return n > bulkFlows, err
		})
		if err != nil {
			stop()
			return nil, fmt.Errorf("a download that should run beside the round trips does not: %w", err)
		}
	}
	return stop, nil
}
