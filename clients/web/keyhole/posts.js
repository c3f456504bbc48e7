/**
 * Posts from text: a post in each line, its tags with # before them.
 *
 * A model knows words and tags by numbers. Which number is which word is the trainer's: the page that
 * has this device tells it, as two lists.
 */

// Letters and digits, held together by one of ' . + # - inside; c++ and c# keep their ends.
const WORD = /[\p{L}\p{N}]+(?:['.+#-][\p{L}\p{N}]+)*(?:\+\+|#)?/gu;
const TAG = /(?<=^|\s)#(\S+)/gu;

/** Returns the words of a text in lower case, as keyhole reads posts. */
export function splitWords(text) {
  return text.toLowerCase().replaceAll("\u2019", "'").match(WORD) ?? [];
}

/**
 * Returns posts as numbers, and how many of their words and tags have one.
 *
 * @param {string} text
 * @param {{words: string[], tags: string[]}} names by their numbers
 */
export function readPosts(text, names) {
  const [words, tags] = [names.words, names.tags].map(numbered);
  const lines = text.split("\n").filter((line) => line.trim());
  const posts = lines.map((line) => ({
    words: numbersOf(splitWords(line.replace(TAG, "")), words),
    tags: numbersOf([...line.toLowerCase().matchAll(TAG)].map(([, tag]) => tag), tags),
  }));
  return {
    posts,
    words: new Set(posts.flatMap((post) => post.words)).size,
    tagged: posts.filter((post) => post.tags.length).length,
  };
}

function numbered(names) {
  return new Map(names.map((name, number) => [name, number]));
}

function numbersOf(found, numbers) {
  return found.flatMap((name) => (numbers.has(name) ? [numbers.get(name)] : []));
}
